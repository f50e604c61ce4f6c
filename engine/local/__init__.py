"""The local disk: backing files in hot_cache, warm blobs, scratch, and what is known about them."""
