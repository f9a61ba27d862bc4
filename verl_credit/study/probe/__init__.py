"""The entropy probe: does the change of entropy that an update makes agree with its first-order prediction?

    δH₁ = ∇H · δθ

``entropy_gradient`` has ∇H (X), ``update`` has δθ (Y), ``change`` joins them and measures the change itself.
docs/probe.md derives the formulas. Everything here is torch in one process.
"""
