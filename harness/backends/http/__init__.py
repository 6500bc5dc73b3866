"""Client of an OpenAI-compatible server: server-sent events, what an answer says, what a server can do, prompts."""
