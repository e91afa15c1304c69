"""The two engines: the writer puts pieces into packs, the reader gets them back."""
