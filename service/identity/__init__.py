"""Same record or same job (R7): which copies of a job are here, which ended lately, and what a further copy gets."""
