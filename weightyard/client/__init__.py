"""The client: a catalogue over HTTP."""
