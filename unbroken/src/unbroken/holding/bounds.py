"""How far the program looks into objects of the user's. All bounds stand in this table."""

# An object lies at most so deep: in an object, in a list, in a dictionary of the module's.
DEEPEST = 8
# A longer list or dictionary holds samples, and no objects that count.
LONGEST = 256
# So many objects are opened for each of those that the walk begins with.
MOST_OBJECTS = 10_000
# A larger array, or a longer list of texts, is taken for data, which a module does not count in.
LARGEST_ARRAY_BYTES = 64 * 2**20
MOST_TEXTS = 1000
# More than this in an attribute of an object that the data module holds is taken for samples.
MOST_BYTES_OF_DATA = 2**20
MOST_ENTRIES_OF_DATA = 10_000
# What is not kept is compared byte by byte up to this size, and by so many bytes of it above.
MOST_BYTES_COMPARED = 2**16
# Entries that are looked at of a long list that is not kept: its last ones.
LAST_ENTRIES = 8
