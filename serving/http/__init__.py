"""The HTTP side: OpenAI and KServe endpoints, metrics, jobs, the chat page, the server."""
