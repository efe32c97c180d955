"""What several test modules use, by subject: a test module imports no other test module."""
