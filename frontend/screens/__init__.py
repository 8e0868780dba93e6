"""The console's screens, a package each: `page` has the view models, `views` the views and their addresses."""
