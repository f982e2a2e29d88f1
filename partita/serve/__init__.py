"""An HTTP server with OpenAI's API over the scheduler: bodies, answers, limits, and figures for Prometheus."""
