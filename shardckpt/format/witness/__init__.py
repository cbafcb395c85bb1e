"""Files of witness records beside the steps of a run."""
