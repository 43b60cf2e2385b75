"""Shipped configurations; ``trinity-vlm train NAME`` reads NAME.yaml from here."""
