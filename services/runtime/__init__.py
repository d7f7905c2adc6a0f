"""What every service needs to run: HTTP server, files, exit statuses. Imports no service."""
