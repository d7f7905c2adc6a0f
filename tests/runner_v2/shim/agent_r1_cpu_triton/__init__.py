"""A Triton back end named "cpu" that compiles nothing: kernels run in Triton's interpreter.

Found through the entry points beside it, by Triton and by every process of vLLM, wherever this
folder is on the import path.
"""
