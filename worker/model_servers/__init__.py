"""Servers of models as processes of this host: started, watched, and ended whatever ends first."""
