"""The protocol of segment-recurrent models and the only loops over segments."""
