"""MONAI data sets over the cache: the only room that imports torch and monai."""
