"""State that a run resumes from, in a folder or an object store, and its one writer."""
