"""Rendering of documents: text for terminals, Markdown, HTML."""
