"""Code inside a sandbox, in whichever interpreter runs the program: standard library only."""
