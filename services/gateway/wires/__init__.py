"""The forms in which agents speak to a model, one file for each."""
