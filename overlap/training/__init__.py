"""The main job: train a byte-level language model on text files."""
