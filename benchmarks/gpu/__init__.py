"""All that is to be measured on a GPU, as stages of one command."""
