"""PPDSparse, and DiSMEC as a setting of it."""
