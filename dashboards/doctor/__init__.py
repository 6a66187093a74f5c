"""A doctor for dashboards and rules: ours and other people's."""
