@echo off
rem Goes on with the newest run of a recipe.   resume.bat RECIPE [options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=resume"
set LR_ARGS=%*
"%~dp0_run.bat"
