"""Looking into a cache without the code that filled it: what is in it, made how, is it sound, what can go."""
