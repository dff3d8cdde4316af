"""What ``peers.py`` compares: one module per adapter, and what measures one case of it.

``_case`` says what a case is, ``_table`` lists all of them with their settings. An adapter turns a
model and an optimizer into a training loop's hooks; it is imported in the process that runs it,
so that a peer which is not installed fails alone. ``_pace`` makes the time of a step a constant,
``_measure`` takes the figures in a rank's process, ``_host`` starts these processes, ``_rows``
makes rows of the figures.
"""
