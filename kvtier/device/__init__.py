"""Streams, events and copies of one device. Needs torch."""
