"""What a run resumes from, in a folder or an object store, and which learner may write it."""
