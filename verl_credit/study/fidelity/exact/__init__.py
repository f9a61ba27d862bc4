"""The expected gradient of every mode on questions so small that all trajectories and all groups can be listed."""
