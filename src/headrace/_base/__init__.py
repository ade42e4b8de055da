"""Parts without knowledge of loading: text, descriptors, types."""
