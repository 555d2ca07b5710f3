"""Everything Hugging Face."""
