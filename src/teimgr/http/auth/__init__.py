"""Authentication and authorisation: keys, client certificates, and the policy of both ports."""
