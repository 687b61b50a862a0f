"""The run-command transport: one Systems Manager command a host, its events back through S3."""
