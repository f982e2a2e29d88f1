"""An HTTP server with OpenAI's API: request bodies, responses, limits, and Prometheus metrics."""
