"""Campaigns: conditions times seeds times worlds, run to their end and compared with statistics that say what they cannot
say (docs/campaigns.md)."""
