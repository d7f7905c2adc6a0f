"""Basis of every service: HTTP server, files, exit statuses. Imports no service."""
