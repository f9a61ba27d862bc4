"""Swaps replace a turn of a rollout by other proposals of the policy: does credit go to the better turns?"""
