"""The measuring harness: runs a workload on an engine, records what happened and turns it into tables and reports.

Data flows one way: config -> workload -> driver -> backend -> records -> tables -> report. See docs/architecture.md.
"""
