"""Parts shared by all screens: page context, layout, panels, forms, numbers and dates."""
