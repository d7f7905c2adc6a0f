"""The console: runs, curves, services and evaluations in a browser."""
