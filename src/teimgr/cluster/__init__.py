"""A fleet on several hosts: the certificate authority of the fleet, and how nodes join it."""
