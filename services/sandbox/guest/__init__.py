"""What runs inside a sandbox, in whichever interpreter runs the code: standard library only."""
