"""Every clause of the manager's contract and the tests that prove it."""
