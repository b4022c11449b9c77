"""Requests and streams: what is asked of a server, when, and what came back."""
