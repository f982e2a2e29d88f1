"""An HTTP server with OpenAI's API over the scheduler: bodies read, answers written, limits kept, figures for Prometheus."""
