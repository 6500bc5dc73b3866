"""``cb-compare``: two result sets measured apart, and what may be concluded from them."""
