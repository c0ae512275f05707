"""Files that tasks read and make on a node: verified, as columns, in folders of their own."""
