"""The service and the command line of msds."""
