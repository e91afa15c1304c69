"""The client: a service's yard, as a Catalogue."""
