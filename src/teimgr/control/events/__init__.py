"""Fleet events: changes of instances, kept for readers and posted to webhooks."""
