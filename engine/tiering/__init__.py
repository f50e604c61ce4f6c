"""What moves data between the tiers: hashing and sealing, upload, hydration, eviction, cold scans."""
