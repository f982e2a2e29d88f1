"""What a report says, section by section, computed once: the views only set it in type. Text, never markup."""
