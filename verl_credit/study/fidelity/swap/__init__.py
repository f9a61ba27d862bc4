"""One turn of a rollout is replaced by others that the policy itself proposes: does credit go to the better ones?"""
