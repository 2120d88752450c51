"""Are the answers as good as with full attention? Measured (`evaluate`), and decided by it (`calibrate`)."""
